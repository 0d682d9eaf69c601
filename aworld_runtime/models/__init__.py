"""Models: one client for every engine (`client`), a policy in training (`policy`), a scripted one (`scripted`)."""
