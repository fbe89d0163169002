"""A dashboard for Grafana over the metrics of coordinator, hosts and drivers."""
