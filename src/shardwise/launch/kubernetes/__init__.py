"""Manifests: a JobSet or a TrainJob that trains, a LeaderWorkerSet with a Service that serves."""
