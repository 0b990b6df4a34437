"""Strategies compared on graphs, and the smallest budgets that they meet."""
