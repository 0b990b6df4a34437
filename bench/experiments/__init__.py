"""One module an experiment: its typed row, its columns, its figure."""
