//! Owns the places that a caller gives for results.

use std::ffi::c_char;
use std::marker::PhantomData;

use crate::codes::{Answer, Code};

/// `T *` of a C function. NULL is answered with INVALID_VALUE.
#[repr(transparent)]
#[derive(Debug)]
pub struct Out<'a, T> {
    place: *mut T,
    caller: PhantomData<&'a mut T>,
}

impl<'a, T> From<&'a mut T> for Out<'a, T> {
    fn from(place: &'a mut T) -> Self {
        Self {
            place,
            caller: PhantomData,
        }
    }
}

impl<T> Out<'_, T> {
    pub(crate) fn set(self, value: T) -> Answer {
        if self.place.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: only C callers and `From` make such values, and both give a place that one `T` can be written to.
        unsafe { self.place.write(value) };
        Ok(())
    }

    /// For a place that may be left out.
    pub(crate) fn set_if_given(self, value: T) {
        let _ = self.set(value);
    }
}

impl Out<'_, c_char> {
    /// As much of the text as fits with a NUL. `length`: how many bytes the caller has there.
    pub(crate) fn set_text(self, text: &str, length: i32) -> Answer {
        let room = usize::try_from(length).ok().and_then(|length| length.checked_sub(1));
        let room = room.filter(|_| !self.place.is_null()).ok_or(Code::INVALID_VALUE)?;
        let bytes = &text.as_bytes()[..text.len().min(room)];
        // SAFETY: the caller has promised `length` bytes, and the text with its NUL is no longer.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr().cast(), self.place, bytes.len());
            self.place.add(bytes.len()).write(0);
        }
        Ok(())
    }
}
