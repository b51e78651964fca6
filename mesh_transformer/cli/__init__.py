"""The subcommands of the program `mesh-transformer`, and their flags."""
