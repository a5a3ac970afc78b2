"""The command line: subcommands, options and their errors."""
