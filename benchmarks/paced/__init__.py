"""Paced ranks: the ranks' RPC protocol with modelled times, many instances in one process."""
