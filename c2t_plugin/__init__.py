"""C2T: a small classifier scores draft tokens in speculative decoding and cuts each request's draft chain."""
