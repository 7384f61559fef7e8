"""Communication between our processes: channels, tokens, addresses, daemons, a gRPC client that survives a fork.

Other packages import: `acceptor`, `channel`, `daemon`, `grpc_server`, `listeners`, `resolving`, `tokens`.
"""
