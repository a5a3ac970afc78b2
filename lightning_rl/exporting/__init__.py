"""Export policies to files that can be used without this package: graphs from raw observations to environment actions, or bare weights."""
