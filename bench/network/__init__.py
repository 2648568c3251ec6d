"""Several hosts on one machine: namespaces, a switch, all-reduces between them, a projection."""
