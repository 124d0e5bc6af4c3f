//! From a unit to an image that a device loads: out of the cache, or by NVRTC, which needs no device. So kernels for any
//! architecture can be compiled on any machine.

use thiserror::Error;

use super::attention_shape::{AttentionShape, HeadDim};
use super::cache::{CacheKey, KernelCache};
use super::calls::CallError;
use super::driver::{self, Arch, CompileError, CudaError, Image, Libraries};
use super::resources::{ResourceError, of_entry};
use super::source::Unit;
use super::table::KernelId;

/// Why a kernel cannot be used.
#[derive(Debug, Error)]
pub enum KernelError {
    #[error("kernels of {unit} were not compiled: {source}")]
    Compile { unit: String, source: CompileError },
    #[error("kernels of {unit} are not as they should be: {source}")]
    Resources { unit: String, source: ResourceError },
    #[error("kernel {kernel:?} could not be {what}: {source}")]
    Device {
        kernel: KernelId,
        what: &'static str,
        source: CudaError,
    },
    #[error("the kernels of {unit} could not be loaded: {source}")]
    Load { unit: String, source: CudaError },
    #[error("kernel {kernel:?} was not loaded for this model's attention: a bug of the GPU engine")]
    NotLoaded { kernel: KernelId },
    #[error(transparent)]
    Call(#[from] CallError),
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

/// What the device is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageForm {
    /// Machine code for one architecture: every real device.
    Cubin,
    /// Only for the false driver of the tests, which cannot run machine code.
    Ptx,
}

impl ImageForm {
    fn name(self) -> &'static str {
        match self {
            ImageForm::Cubin => "cubin",
            ImageForm::Ptx => "ptx",
        }
    }
}

/// For what, and with what, kernels are compiled.
#[derive(Clone, Copy)]
pub struct Target<'a> {
    pub libraries: &'a Libraries,
    pub arch: Arch,
    pub nvrtc_version: (u32, u32),
    pub form: ImageForm,
    pub cache: Option<&'a KernelCache>,
}

impl std::fmt::Debug for Target<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Target")
            .field("nvrtc_version", &self.nvrtc_version)
            .field("form", &self.form)
            .finish_non_exhaustive()
    }
}

impl Target<'_> {
    /// The image of a unit. A cache that cannot be written is not an error.
    ///
    /// # Errors
    /// [`KernelError::Compile`].
    pub(crate) fn image(&self, unit: Unit) -> Result<Image, KernelError> {
        let arch = self.arch.to_string();
        let key = CacheKey {
            unit,
            arch: &arch,
            nvrtc_version: self.nvrtc_version,
            form: self.form.name(),
        };
        let cached = self.cache.and_then(|cache| cache.get(&key));
        if let Some(image) = cached.and_then(|bytes| self.wrap(bytes)) {
            return Ok(image);
        }
        let compiled = self.compile(unit)?;
        let (image, content) = match self.form {
            ImageForm::Cubin => (Image::Cubin(compiled.cubin.clone()), compiled.cubin),
            ImageForm::Ptx => (Image::Ptx(compiled.ptx.clone()), compiled.ptx.into_bytes()),
        };
        if let Some(cache) = self.cache {
            // The next start compiles again, that is all.
            let _ = cache.put(&key, &content);
        }
        Ok(image)
    }

    /// `None` for PTX that is no text.
    fn wrap(&self, bytes: Vec<u8>) -> Option<Image> {
        match self.form {
            ImageForm::Cubin => Some(Image::Cubin(bytes)),
            ImageForm::Ptx => String::from_utf8(bytes).ok().map(Image::Ptx),
        }
    }

    fn compile(&self, unit: Unit) -> Result<driver::Compiled, KernelError> {
        driver::compile(self.libraries, unit, self.arch).map_err(|source| KernelError::Compile {
            unit: unit.to_string(),
            source,
        })
    }

    /// Compiles a unit without the cache and checks what ptxas says. One line for each kernel of the unit:
    /// `ARCH ENTRY[DEFINES] registers R stack S spills L`.
    ///
    /// # Errors
    /// [`KernelError::Compile`] or [`KernelError::Resources`].
    pub fn resource_lines(&self, unit: Unit) -> Result<Vec<String>, KernelError> {
        let compiled = self.compile(unit)?;
        let shape = AttentionShape {
            head_dim: unit.head_dim.unwrap_or(HeadDim::D64),
            group: unit.group.unwrap_or(1),
        };
        let kernels = KernelId::ALL.iter().filter(|id| id.facts().file == unit.file);
        let lines = kernels.map(|id| -> Result<String, ResourceError> {
            let resources = of_entry(&compiled.log, id.entry())?;
            resources.check(id.entry(), id.threads(shape))?;
            let (registers, stack) = (resources.registers, resources.stack_bytes);
            let spills = resources.spill_store_bytes + resources.spill_load_bytes;
            let variant = unit.defines().join(",");
            let arch = self.arch.to_string();
            let entry = id.entry();
            Ok(format!("{arch} {entry}[{variant}] registers {registers} stack {stack} spills {spills}"))
        });
        lines.collect::<Result<Vec<String>, ResourceError>>().map_err(|source| KernelError::Resources {
            unit: unit.to_string(),
            source,
        })
    }
}
