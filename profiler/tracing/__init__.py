"""User code in, a traced graph out: nothing here measures or estimates."""
