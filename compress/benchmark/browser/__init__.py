"""The browser as a measuring device: a page of ours runs onnxruntime-web wherever its
link is opened. See `device`."""
