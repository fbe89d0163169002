"""Run real services for tests: a Kafka broker, HDFS and YARN, each as a separate process."""
