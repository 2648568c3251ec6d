"""Several hosts on one machine: namespaces, a switch, all-reduces, a projection."""
