"""All-reduces and reading timed on a job's nodes, and the constants of the cost model derived from that."""
