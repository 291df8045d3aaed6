"""Processes that have imported all a rank needs, and wait: ranks that are started again are forked from them."""
