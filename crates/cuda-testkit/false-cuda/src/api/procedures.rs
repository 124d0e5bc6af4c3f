//! Owns the functions that need no driver: names of errors, and the look-up of functions. NVRTC asks a libcuda that is present for
//! the latter; "not found" is an answer that it can live with.

use std::ffi::{c_char, c_int, c_void};

use super::api;
use super::out::Out;
use crate::codes::Code;

/// `CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND`.
const SYMBOL_NOT_FOUND: c_int = 1;

api! {
fn cuGetErrorName(Nothing, _driver, code: c_int, name: Out<'_, *const c_char>) {
    match Code(code).words() {
        Some((words, _)) => name.set(words.as_ptr()),
        None => {
            name.set(std::ptr::null())?;
            Err(Code::INVALID_VALUE)
        }
    }
}

fn cuGetErrorString(Nothing, _driver, code: c_int, text: Out<'_, *const c_char>) {
    match Code(code).words() {
        Some((_, words)) => text.set(words.as_ptr()),
        None => {
            text.set(std::ptr::null())?;
            Err(Code::INVALID_VALUE)
        }
    }
}

fn cuGetProcAddress(
    Nothing, _driver,
    _name: *const c_char, function: Out<'_, *mut c_void>, _version: c_int, _flags: u64,
) {
    function.set(std::ptr::null_mut())?;
    Err(Code::NOT_FOUND)
}

fn cuGetProcAddress_v2(
    Nothing, _driver,
    _name: *const c_char, function: Out<'_, *mut c_void>, _version: c_int, _flags: u64, status: Out<'_, c_int>,
) {
    function.set(std::ptr::null_mut())?;
    status.set_if_given(SYMBOL_NOT_FOUND);
    Err(Code::NOT_FOUND)
}

fn cuGetExportTable(Nothing, _driver, table: Out<'_, *const c_void>, _id: *const c_void) {
    table.set(std::ptr::null())?;
    Err(Code::NOT_FOUND)
}
}
