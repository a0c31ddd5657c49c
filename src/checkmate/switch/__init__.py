"""What makes a switch replicate gradients: a description of the cluster, the rules it asks for, two kinds of switch."""
