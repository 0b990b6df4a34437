"""The commands of `python -m bench`, one module each: HELP, add_options(parser) and run(options)."""
