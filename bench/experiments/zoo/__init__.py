"""`python -m bench zoo`: both doors on every architecture that the libraries have."""
