"""The command ``gym-compress``: a module for each of its subcommands."""
