"""Places below the device where blocks of KV may lie: host memory shared between processes, disk."""
