"""The machine at hand: its memory, its clock, fresh processes, and files of rows."""
