"""Run real services for tests: a Kafka broker, HDFS and YARN, each as a process of its own."""
