"""Traced code goes the way that it goes in eager: what it asks, calls, reads and draws is answered so."""
