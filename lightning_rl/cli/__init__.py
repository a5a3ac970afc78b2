"""The command line: subcommands, configs, errors."""
