"""Settings: their fields and names, YAML files, and objects given by a dotted path."""
