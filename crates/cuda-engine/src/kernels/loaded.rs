//! The kernels of one shape of attention, loaded on a device, and the launch of a call.

use std::collections::BTreeMap;

use super::attention_shape::AttentionShape;
use super::calls::{Call, Value};
use super::compile::{KernelError, Target};
use super::driver::{Args, Device, DevicePtr, Function, Geometry, Module, Stream};
use super::source::{KernelFile, Unit};
use super::table::KernelId;

/// Shared memory that a block has without asking (CUDA C++ programming guide, technical specifications).
const SHARED_BYTES_WITHOUT_ASKING: u32 = 48 << 10;

/// Every kernel, for one shape of attention.
pub struct Kernels {
    shape: AttentionShape,
    functions: BTreeMap<KernelId, Function>,
    /// Functions live as long as their modules. Dropped after them.
    _modules: Vec<Module>,
}

impl std::fmt::Debug for Kernels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Kernels")
            .field("shape", &self.shape)
            .field("functions", &self.functions.len())
            .finish_non_exhaustive()
    }
}

impl Kernels {
    /// Compiles or reads, and loads, all of them. Loading may wait for the whole device, so it is done before the first step.
    ///
    /// # Errors
    /// [`KernelError`], which names the file or the kernel.
    pub fn load(device: &Device, target: &Target<'_>, shape: AttentionShape) -> Result<Self, KernelError> {
        let mut kernels = Self {
            shape,
            functions: BTreeMap::new(),
            _modules: Vec::new(),
        };
        for file in KernelFile::ALL {
            let unit = Unit::of(file, shape);
            let image = target.image(unit)?;
            let module = device.load(&image).map_err(|cause| KernelError::Load {
                unit: unit.to_string(),
                cause,
            })?;
            for id in KernelId::ALL.iter().filter(|id| id.facts().file == file) {
                kernels.functions.insert(*id, prepare(&module, *id, shape)?);
            }
            kernels._modules.push(module);
        }
        Ok(kernels)
    }

    pub fn shape(&self) -> AttentionShape {
        self.shape
    }

    /// Puts a call onto a stream. It allocates nothing on the device and waits for nothing.
    ///
    /// # Errors
    /// [`KernelError::Device`] with the kernel's name.
    pub fn launch(&self, stream: &Stream, call: &Call) -> Result<(), KernelError> {
        let kernel = call.kernel;
        let function = self.functions.get(&kernel).ok_or(KernelError::NotLoaded { kernel })?;
        let args = call.values().iter().fold(Args::new(), |args, value| match *value {
            Value::Pointer(address) => args.pointer(DevicePtr(address)),
            Value::U32(value) => args.u32(value),
            Value::U64(value) => args.u64(value),
            Value::F32(value) => args.f32(value),
        });
        let geometry = Geometry {
            grid: call.grid,
            block: [kernel.threads(self.shape), 1, 1],
            shared_bytes: kernel.shared_bytes(self.shape),
        };
        stream
            .launch(function, geometry, &args)
            .map_err(|cause| KernelError::Device {
                kernel,
                what: "launched",
                cause,
            })
    }
}

fn prepare(module: &Module, kernel: KernelId, shape: AttentionShape) -> Result<Function, KernelError> {
    let failed = |what| move |cause| KernelError::Device { kernel, what, cause };
    let function = module.function(kernel.entry()).map_err(failed("found in its module"))?;
    let shared_bytes = kernel.shared_bytes(shape);
    if shared_bytes > SHARED_BYTES_WITHOUT_ASKING {
        function
            .allow_shared_bytes(shared_bytes)
            .map_err(failed("given its shared memory"))?;
    }
    Ok(function)
}
