"""Tables, figures and pages: what is drawn is decided by pure functions, drawing is thin."""
