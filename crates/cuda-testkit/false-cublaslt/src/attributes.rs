//! Owns the objects that a caller makes and the attributes that it sets on them. As in the real library (tried on 13.1 without a
//! GPU), an unknown attribute or a wrong size is INVALID_VALUE, and values are looked at only when a product is asked for.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::status::{Answer, Status};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Handle,
    /// `cublasLtMatmulDesc_t`
    Operation,
    Layout,
    Preference,
}

/// `cublasLtMatmulDescAttributes_t`
pub(crate) mod operation {
    pub(crate) const COMPUTE_TYPE: i32 = 0;
    pub(crate) const SCALE_TYPE: i32 = 1;
    pub(crate) const POINTER_MODE: i32 = 2;
    pub(crate) const TRANSA: i32 = 3;
    pub(crate) const TRANSB: i32 = 4;
    pub(crate) const EPILOGUE: i32 = 7;
    /// They say how fast, not what.
    pub(crate) const HINTS: [i32; 2] = [15, 25];
}

/// `cublasLtMatrixLayoutAttribute_t`
pub(crate) mod layout {
    pub(crate) const TYPE: i32 = 0;
    pub(crate) const ORDER: i32 = 1;
    pub(crate) const ROWS: i32 = 2;
    pub(crate) const COLS: i32 = 3;
    pub(crate) const LD: i32 = 4;
    pub(crate) const BATCH_COUNT: i32 = 5;
    pub(crate) const BATCH_OFFSET: i32 = 6;
}

/// `cublasLtMatmulPreferenceAttributes_t`
pub(crate) mod preference {
    pub(crate) const MAX_WORKSPACE_BYTES: i32 = 1;
}

/// The bytes of an attribute (`cublasLt.h` 13.1). `None`: none that the double knows.
fn bytes_of(kind: Kind, attribute: i32) -> Option<usize> {
    match (kind, attribute) {
        // Types, modes, transpositions, epilogue, hints.
        (Kind::Operation, 0..=7 | 15 | 22 | 26) => Some(4),
        // Pointers and strides.
        (Kind::Operation, 8 | 10..=14 | 17..=21 | 23 | 24) => Some(8),
        (Kind::Operation, 25) => Some(1),
        (Kind::Layout, 0 | 1 | 5) => Some(4),
        (Kind::Layout, 2..=4 | 6 | 7) => Some(8),
        (Kind::Preference, 0 | 3 | 5..=9) => Some(4),
        (Kind::Preference, 1 | 12) => Some(8),
        _ => None,
    }
}

/// Values as they were set: sign and type are the reader's business.
#[derive(Clone, Debug)]
pub(crate) struct Object {
    kind: Kind,
    values: BTreeMap<i32, u64>,
}

impl Object {
    pub(crate) fn new(kind: Kind, values: &[(i32, u64)]) -> Self {
        Self {
            kind,
            values: values.iter().copied().collect(),
        }
    }

    pub(crate) fn get(&self, attribute: i32, default: u64) -> u64 {
        self.values.get(&attribute).copied().unwrap_or(default)
    }

    /// Attributes that were set to something else than 0, but for these.
    pub(crate) fn sets_beside(&self, known: &[i32]) -> bool {
        self.values
            .iter()
            .any(|(attribute, value)| *value != 0 && !known.contains(attribute))
    }
}

/// Handles are numbers, which is the same to a caller.
struct Objects {
    next: u64,
    alive: BTreeMap<u64, Object>,
}

static OBJECTS: Mutex<Objects> = Mutex::new(Objects {
    next: 0x10,
    alive: BTreeMap::new(),
});

fn objects() -> MutexGuard<'static, Objects> {
    OBJECTS.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn add(object: Object) -> u64 {
    let mut objects = objects();
    objects.next += 0x10;
    let handle = objects.next;
    objects.alive.insert(handle, object);
    handle
}

/// A copy of an object, as it is now.
pub(crate) fn find(handle: u64, kind: Kind) -> Result<Object, Status> {
    let objects = objects();
    let object = objects.alive.get(&handle).filter(|object| object.kind == kind);
    object.cloned().ok_or(Status::InvalidValue)
}

pub(crate) fn remove(handle: u64, kind: Kind) -> Answer {
    find(handle, kind)?;
    objects().alive.remove(&handle);
    Ok(())
}

pub(crate) fn set(handle: u64, kind: Kind, attribute: i32, value: &[u8]) -> Answer {
    if bytes_of(kind, attribute) != Some(value.len()) {
        return Err(Status::InvalidValue);
    }
    let mut word = [0; 8];
    word[..value.len()].copy_from_slice(value);
    let mut objects = objects();
    let object = objects.alive.get_mut(&handle).filter(|object| object.kind == kind);
    object
        .ok_or(Status::InvalidValue)?
        .values
        .insert(attribute, u64::from_le_bytes(word));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_size_or_number_is_refused_and_a_strange_value_is_not() {
        let handle = add(Object::new(Kind::Operation, &[]));
        let set = |attribute, value: &[u8]| set(handle, Kind::Operation, attribute, value);
        assert_eq!(set(operation::TRANSA, &7_i32.to_le_bytes()), Ok(()));
        assert_eq!(set(operation::TRANSA, &1_i64.to_le_bytes()), Err(Status::InvalidValue));
        assert_eq!(set(99, &1_i32.to_le_bytes()), Err(Status::InvalidValue));
        assert_eq!(find(handle, Kind::Operation).unwrap().get(operation::TRANSA, 0), 7);
        assert_eq!(find(handle, Kind::Layout).unwrap_err(), Status::InvalidValue);
        assert_eq!(remove(handle, Kind::Operation), Ok(()));
        assert_eq!(remove(handle, Kind::Operation), Err(Status::InvalidValue));
    }
}
