"""The server's end of a connection: frames, the client behind them, errors, and failed handshakes."""
