"""Paced ranks: the ranks' RPC protocol with modeled times, many instances in one process."""
