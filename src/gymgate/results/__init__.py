"""What stored runs say beyond their summary: comparison, rescoring, reports, exports, trackers, spans."""
