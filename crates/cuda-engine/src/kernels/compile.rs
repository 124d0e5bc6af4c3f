//! From a unit to an image that a device loads: out of the cache, or by NVRTC, which needs no device. So kernels for any
//! architecture can be compiled on any machine.

use std::io;

use thiserror::Error;

use super::attention_shape::{AttentionShape, HeadDim};
use super::cache::{CacheKey, KernelCache, TURN_WITHIN};
use super::calls::CallError;
use super::driver::{
    self, Arch, ArchError, CompileError, CudaError, Device, DeviceFacts, Image, Libraries, LibraryDecision, Version,
};
use super::resources::{ResourceError, of_entry};
use super::source::Unit;
use super::table::KernelId;

/// Why a kernel cannot be used.
#[derive(Debug, Error)]
pub enum KernelError {
    #[error("kernels cannot be compiled: NVRTC is {0}")]
    NoCompiler(LibraryDecision),
    #[error(transparent)]
    Arch(#[from] ArchError),
    #[error("kernels of {unit} were not compiled: {cause}")]
    Compile { unit: String, cause: Box<CompileError> },
    #[error("kernels of {unit} are not as they should be: {cause}")]
    Resources { unit: String, cause: ResourceError },
    #[error("kernel {kernel:?} could not be {what}: {cause}")]
    Device {
        kernel: KernelId,
        what: &'static str,
        cause: CudaError,
    },
    #[error("compiled kernels cannot be kept: {0}")]
    Keep(io::Error),
    #[error("the kernels of {unit} could not be loaded: {cause}")]
    Load { unit: String, cause: CudaError },
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

/// The false driver of the tests has devices of such names.
const FALSE_DEVICE: &str = "False";

impl ImageForm {
    pub fn of(device: &DeviceFacts) -> Self {
        match device.name.starts_with(FALSE_DEVICE) {
            true => ImageForm::Ptx,
            false => ImageForm::Cubin,
        }
    }

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
    pub nvrtc_version: Version,
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

impl<'a> Target<'a> {
    /// What an opened device needs.
    ///
    /// # Errors
    /// [`KernelError::Arch`], or [`KernelError::NoCompiler`] with the loader's reason.
    pub fn of(libraries: &'a Libraries, device: &Device, cache: Option<&'a KernelCache>) -> Result<Self, KernelError> {
        let facts = device.facts();
        let form = ImageForm::of(facts);
        let arch = Arch::of(facts.compute_capability)?;
        Self::new(libraries, (arch, form), cache)
    }

    /// # Errors
    /// [`KernelError::NoCompiler`] with the loader's reason.
    pub fn new(
        libraries: &'a Libraries,
        (arch, form): (Arch, ImageForm),
        cache: Option<&'a KernelCache>,
    ) -> Result<Self, KernelError> {
        let compiler = &libraries.report().nvrtc;
        let version = libraries.nvrtc_version();
        Ok(Self {
            libraries,
            arch,
            nvrtc_version: version.ok_or_else(|| KernelError::NoCompiler(compiler.clone()))?,
            form,
            cache,
        })
    }

    /// The image of a unit. A cache that cannot be written is not an error.
    ///
    /// # Errors
    /// [`KernelError::Compile`].
    pub(crate) fn image(&self, unit: Unit) -> Result<Image, KernelError> {
        let arch = self.arch.to_string();
        if let Some(image) = self.cached(unit) {
            return Ok(image);
        }
        let key = self.key(unit, &arch);
        let _turn = self.cache.and_then(|cache| cache.turn(&key, TURN_WITHIN));
        // Another process may have compiled it meanwhile.
        if let Some(image) = self.cached(unit) {
            return Ok(image);
        }
        let compiled = self.compile(unit)?;
        // The next start compiles again, that is all.
        let _ = self.keep(unit, &compiled);
        Ok(match self.form {
            ImageForm::Cubin => Image::Cubin(compiled.cubin),
            ImageForm::Ptx => Image::Ptx(compiled.ptx),
        })
    }

    fn cached(&self, unit: Unit) -> Option<Image> {
        let bytes = self.cache?.get(&self.key(unit, &self.arch.to_string()))?;
        self.wrap(bytes)
    }

    fn key<'k>(&self, unit: Unit, arch: &'k str) -> CacheKey<'k> {
        CacheKey {
            unit,
            arch,
            nvrtc_version: self.nvrtc_version,
            form: self.form.name(),
        }
    }

    fn keep(&self, unit: Unit, compiled: &driver::Compiled) -> io::Result<()> {
        let Some(cache) = self.cache else { return Ok(()) };
        let arch = self.arch.to_string();
        let content = match self.form {
            ImageForm::Cubin => compiled.cubin.as_slice(),
            ImageForm::Ptx => compiled.ptx.as_bytes(),
        };
        cache.put(&self.key(unit, &arch), content)
    }

    /// `None` for PTX that is no text.
    fn wrap(&self, bytes: Vec<u8>) -> Option<Image> {
        match self.form {
            ImageForm::Cubin => Some(Image::Cubin(bytes)),
            ImageForm::Ptx => String::from_utf8(bytes).ok().map(Image::Ptx),
        }
    }

    fn compile(&self, unit: Unit) -> Result<driver::Compiled, KernelError> {
        driver::compile(self.libraries, unit, self.arch).map_err(|cause| KernelError::Compile {
            unit: unit.to_string(),
            cause: Box::new(cause),
        })
    }

    /// Compiles a unit into the cache and checks what ptxas says. One line for each kernel of the unit:
    /// `ARCH ENTRY[DEFINES] registers R stack S spills L`.
    ///
    /// # Errors
    /// [`KernelError::Compile`], [`KernelError::Resources`], or [`KernelError::Keep`].
    pub fn build(&self, unit: Unit) -> Result<Vec<String>, KernelError> {
        let compiled = self.compile(unit)?;
        let lines = self.resource_lines(unit, &compiled.log);
        let lines = lines.map_err(|cause| KernelError::Resources {
            unit: unit.to_string(),
            cause,
        })?;
        self.keep(unit, &compiled).map_err(KernelError::Keep)?;
        Ok(lines)
    }

    fn resource_lines(&self, unit: Unit, log: &str) -> Result<Vec<String>, ResourceError> {
        let shape = AttentionShape {
            head_dim: unit.head_dim.unwrap_or(HeadDim::D64),
            group: unit.group.unwrap_or(1),
        };
        let kernels = KernelId::ALL.iter().filter(|id| id.facts().file == unit.file);
        let lines = kernels.map(|id| {
            let resources = of_entry(log, id.entry())?;
            resources.check(id.entry(), id.threads(shape))?;
            let (registers, stack) = (resources.registers, resources.stack_bytes);
            let spills = resources.spill_store_bytes + resources.spill_load_bytes;
            let variant = unit.defines().join(",");
            let (arch, entry) = (self.arch, id.entry());
            Ok(format!(
                "{arch} {entry}[{variant}] registers {registers} stack {stack} spills {spills}"
            ))
        });
        lines.collect()
    }
}
