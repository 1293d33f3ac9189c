"""Rendezvous: the exchange of addresses between processes that are not connected yet."""
