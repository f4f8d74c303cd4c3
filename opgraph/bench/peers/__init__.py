"""Who is measured: one module for each peer, with a record called PEER; `opgraph.bench.peers.table` lists them."""
