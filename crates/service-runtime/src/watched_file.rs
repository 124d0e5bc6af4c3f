//! Whether a file has changed since it was looked at.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

/// What changes when a file is written or replaced, or gets other rights. `None`: it cannot be looked at.
pub type Seen = Option<[i64; 6]>;

pub fn look(path: &Path) -> Seen {
    // A volume of Kubernetes changes a link to a link, so this follows links.
    let file = std::fs::metadata(path).ok()?;
    let (ino, size) = (file.ino().cast_signed(), file.size().cast_signed());
    Some([
        ino,
        size,
        file.mtime(),
        file.mtime_nsec(),
        file.ctime(),
        file.ctime_nsec(),
    ])
}
