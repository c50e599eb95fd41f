"""Plan which stored chunks each rank reads, and fill the state with them."""
