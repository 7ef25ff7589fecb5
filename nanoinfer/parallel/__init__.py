"""One model on several devices: tensor, pipeline, context and expert parallel, and plain copies."""
