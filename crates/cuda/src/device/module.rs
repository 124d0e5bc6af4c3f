//! Code on a device: modules, and the functions in them.

use std::ffi::{CString, c_int, c_uint, c_void};
use std::fmt;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUfunction_attribute as Attribute, CUjit_option};

use super::context::{Context, Garbage};
use super::handle::Raw;
use crate::calls;
use crate::error::{CudaError, check};

/// The driver's own words on an image that it refuses are cut after this.
const LOG_BYTES: usize = 4096;

/// What a module is loaded from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Image {
    /// Machine code for one architecture.
    Cubin(Vec<u8>),
    /// Text that the driver compiles, if it knows this version of PTX.
    Ptx(String),
}

impl Image {
    fn kind(&self) -> &'static str {
        match self {
            Image::Cubin(_) => "cubin",
            Image::Ptx(_) => "PTX",
        }
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Image::Cubin(bytes) => bytes,
            Image::Ptx(text) => text.as_bytes(),
        }
    }

    /// The driver finds the end of machine code in its header, and that of a text by a zero. Both get one, so that a broken
    /// header meets it at least at the end of the file.
    fn with_end(&self) -> Vec<u8> {
        let bytes = self.bytes();
        let mut ended = Vec::with_capacity(bytes.len() + 1);
        ended.extend_from_slice(bytes);
        ended.push(0);
        ended
    }

    /// The first bytes of an ELF file (System V ABI). The driver reads an image without knowing its length, so other bytes are
    /// not shown to it as machine code.
    fn is_plausible(&self) -> bool {
        match self {
            Image::Cubin(bytes) => bytes.starts_with(b"\x7fELF"),
            Image::Ptx(text) => !text.is_empty(),
        }
    }
}

/// A module of the driver, as long as somebody uses a function of it.
#[derive(Debug)]
pub(super) struct Loaded {
    context: Arc<Context>,
    raw: Raw<sys::CUmod_st>,
}

impl Drop for Loaded {
    fn drop(&mut self) {
        self.context.discard(Garbage::Module { raw: self.raw });
    }
}

#[derive(Clone, Debug)]
pub struct Module {
    loaded: Arc<Loaded>,
}

impl Module {
    pub(super) fn load(context: &Arc<Context>, image: &Image) -> Result<Self, CudaError> {
        const CALL: &str = "cuModuleLoadDataEx";
        let bytes = image.with_end();
        let what = || format!("{} of {} bytes", image.kind(), bytes.len() - 1);
        if !image.is_plausible() {
            return Err(CudaError::misuse(CALL, "the image is empty or no ELF file", what()));
        }
        context.enter_outside_capture(CALL)?;
        let mut log = vec![0_u8; LOG_BYTES];
        let mut options = [
            CUjit_option::CU_JIT_ERROR_LOG_BUFFER,
            CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
        ];
        // The driver takes the size as a value in the place of a pointer, and writes the used size there.
        let mut values: [*mut c_void; 2] = [log.as_mut_ptr().cast(), std::ptr::without_provenance_mut(LOG_BYTES)];
        let count = options.len() as c_uint;
        let mut module: sys::CUmodule = std::ptr::null_mut();
        let (options, values) = (options.as_mut_ptr(), values.as_mut_ptr());
        // SAFETY: the image has an end, the log has as many bytes as the option says, and the driver writes one handle.
        let loaded =
            unsafe { calls::cuModuleLoadDataEx(&raw mut module, bytes.as_ptr().cast(), count, options, values) };
        check(CALL, loaded, || {
            let said = log.split(|byte| *byte == 0).next().unwrap_or_default();
            format!("{}: {}", what(), String::from_utf8_lossy(said).trim())
        })?;
        let loaded = Arc::new(Loaded {
            context: context.clone(),
            raw: Raw(module),
        });
        Ok(Self { loaded })
    }

    /// # Errors
    /// The module has no function of this name.
    pub fn function(&self, name: &str) -> Result<Function, CudaError> {
        const CALL: &str = "cuModuleGetFunction";
        let c_name = CString::new(name).map_err(|_| CudaError::misuse(CALL, "the name has a zero byte", name))?;
        self.loaded.context.enter()?;
        let mut function: sys::CUfunction = std::ptr::null_mut();
        // SAFETY: the module is alive, the name has an end, and the driver writes one handle.
        let found = unsafe { calls::cuModuleGetFunction(&raw mut function, self.loaded.raw.0, c_name.as_ptr()) };
        check(CALL, found, || format!("function {name}"))?;
        Ok(Function {
            loaded: self.loaded.clone(),
            raw: Raw(function),
            name: name.into(),
        })
    }
}

/// A kernel. It keeps its module.
#[derive(Clone)]
pub struct Function {
    loaded: Arc<Loaded>,
    raw: Raw<sys::CUfunc_st>,
    name: Arc<str>,
}

impl fmt::Debug for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Function").field(&self.name).finish()
    }
}

impl Function {
    /// Allows more dynamic shared memory than the 48 KiB that every function has.
    ///
    /// # Errors
    /// More than the device has, less the function's static shared memory.
    pub fn allow_shared_bytes(&self, bytes: u32) -> Result<(), CudaError> {
        const CALL: &str = "cuFuncSetAttribute";
        let what = || format!("{bytes} bytes of shared memory for {}", self.name);
        let value = c_int::try_from(bytes);
        let value = value.map_err(|_| CudaError::misuse(CALL, "more shared memory than any device has", what()))?;
        self.loaded.context.enter()?;
        let attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function is alive.
        check(
            CALL,
            unsafe { calls::cuFuncSetAttribute(self.raw.0, attribute, value) },
            what,
        )
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn handle(&self) -> sys::CUfunction {
        self.raw.0
    }

    pub(super) fn loaded(&self) -> &Arc<Loaded> {
        &self.loaded
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_gets_an_end_that_the_driver_can_find() {
        assert_eq!(Image::Ptx(".version 9.0".to_owned()).with_end(), b".version 9.0\0");
    }

    #[test]
    fn bytes_that_are_no_machine_code_are_not_shown_to_the_driver() {
        assert!(!Image::Cubin(Vec::new()).is_plausible());
        assert!(!Image::Cubin(b"<html>".to_vec()).is_plausible());
        assert!(Image::Cubin(b"\x7fELF\x02".to_vec()).is_plausible());
        assert!(!Image::Ptx(String::new()).is_plausible());
    }
}
