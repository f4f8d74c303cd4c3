"""The measured peers: one module for each, with a record called PEER; `opgraph.bench.peers.table` lists them."""
