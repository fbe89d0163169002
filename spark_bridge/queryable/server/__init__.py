"""The TCP server of a host and its proxy (Flink's KvStateServer and KvStateClientProxy): tokens, admission, rows."""
