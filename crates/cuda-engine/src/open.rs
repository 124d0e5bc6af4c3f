//! From a model file to an engine that serves: what can be refused is refused before anything is loaded, and the kernels are
//! checked before the weights come.

use std::path::PathBuf;
use std::sync::Arc;

use cuda::cublaslt::{CublasLt, GemmError};
use cuda::{Device, Libraries, Stream};
use engine::for_devices::check_block_tokens;
use engine::{DeviceError, KvDtype, KvGeometry, KvMemory, KvMemoryError, LoadProgress, ModelFacts, Rank};
use model_files::config::ModelConfig;
use model_files::model::Model;

use crate::buffers::{BufferSizes, Buffers, Places};
use crate::device_engine::{CudaEngine, Parts};
use crate::error::{CudaEngineError, WorkError};
use crate::forward::{Forward, Pool};
use crate::gate;
use crate::kernels::cache::KernelCache;
use crate::kernels::{AttentionShape, ImageForm, Kernels, Target};
use crate::kv::KvPool;
use crate::libraries::libraries;
use crate::memory::{DeviceNeed, DeviceRoom};
use crate::model::{Capacity, ModelPlan};
use crate::options::{CudaOptions, Mode, ProductChoice};
use crate::products::{Products, Trial};
use crate::step::table_bytes_max;
use crate::wait::{Patience, step_limit};
use crate::weights::{Loading, WeightsPlan, load};

/// Opens a model on a device. Takes seconds to minutes: call it off the async threads.
///
/// # Errors
/// [`CudaEngineError`]. Nothing stays on the device.
pub fn open_cuda_engine(file: &Model, mut options: CudaOptions<'_>) -> Result<CudaEngine, CudaEngineError> {
    options.limits.check()?;
    check_block_tokens(options.block_tokens)?;
    let config = file.config();
    let shape = AttentionShape::new(config.head_dim, config.head_count, config.kv_head_count)?;
    let model = ModelPlan::new(config, shape)?;
    let capacity = Capacity::of(options.limits, (model.context, options.block_tokens), options.mode)?;
    let weights = WeightsPlan::new(file, &model)?;
    let machine = Machine::open(options.ordinal)?;
    let library = machine.library(&options)?;
    let sizes = BufferSizes::new(capacity, table_bytes_max(&capacity), library.is_some());
    let geometry = geometry(config, options.block_tokens);
    let need = DeviceNeed {
        weights: weights.bytes() as u64,
        buffers: Places::bytes(&model, &sizes) as u64,
        kv: 0,
    };
    need.blocks(options.kv, geometry.block_bytes() as u64, machine.room()?)?;
    if let Some(fits) = options.fits.take() {
        fits();
    }
    let cache = KernelCache::of_user(|name| std::env::var_os(name).map(PathBuf::from));
    let target = machine.target(cache.as_ref())?;
    let numerics_id = options.mode.numerics_id(&target);
    let gate = gate::pass(&machine.device, &target, shape, cache.as_ref())?;
    let kernels = Arc::new(Kernels::load(&machine.device, &target, shape)?);
    // Another process may have come onto the GPU while the kernels were compiled and checked.
    let blocks = need.blocks(options.kv, geometry.block_bytes() as u64, machine.room()?)?;
    let patience = machine.patience(&options);
    let (pool, kv) = machine.kv_memory(&patience, geometry, blocks)?;
    let mut forward = Forward {
        weights: machine.load(weights, &kernels, options.progress)?,
        buffers: Buffers::new((&machine.device, &machine.stream), &model, &sizes)?,
        products: Products::own(kernels.clone()),
        kernels,
        pool: Pool {
            start: pool.start(),
            block_bytes: geometry.block_bytes() as u64,
            layer_bytes: geometry.layer_bytes() as u64,
            block_tokens: geometry.block_tokens,
        },
        model,
        capacity,
    };
    if let Some(library) = library {
        forward.products = machine.choose_products(&forward, &library, options.products)?;
    }
    let Machine {
        device,
        stream,
        is_false,
        ..
    } = machine;
    let mut engine = CudaEngine::new(Parts {
        facts: facts(file, geometry, numerics_id),
        limits: options.limits,
        mode: options.mode,
        gate,
        device,
        stream,
        patience,
        forward,
        pool,
        kv,
    })?;
    if !is_false {
        engine.run_first()?;
    }
    Ok(engine)
}

fn geometry(config: &ModelConfig, block_tokens: u32) -> KvGeometry {
    KvGeometry {
        layer_count: config.layer_count as u32,
        kv_head_count: config.kv_head_count as u32,
        head_dim: config.head_dim as u32,
        block_tokens,
        dtype: KvDtype::Bf16,
    }
}

fn facts(file: &Model, kv: KvGeometry, numerics_id: String) -> ModelFacts {
    let config = file.config();
    ModelFacts {
        name: file.name(),
        vocab_size: config.vocab_size as u32,
        context_length: config.context_length as u32,
        numerics_id,
        weights_sha256: file.content_sha256(),
        kv,
        rope_base: config.rope.base,
        rank: Rank::WHOLE,
    }
}

/// A device, and the stream of its engine.
struct Machine {
    libraries: Arc<Libraries>,
    device: Device,
    stream: Stream,
    /// The false driver of the tests knows no speed.
    is_false: bool,
}

impl Machine {
    fn open(ordinal: u32) -> Result<Self, CudaEngineError> {
        let libraries = libraries();
        let failed = |cause| CudaEngineError::Device { ordinal, cause };
        let device = Device::open(&libraries, ordinal).map_err(failed)?;
        tracing::info!(device = %device.facts(), "a CUDA device is opened; this engine has not been run on hardware");
        Ok(Self {
            stream: device.stream().map_err(failed)?,
            is_false: ImageForm::of(device.facts()) == ImageForm::Ptx,
            device,
            libraries,
        })
    }

    fn room(&self) -> Result<DeviceRoom, CudaEngineError> {
        Ok(DeviceRoom {
            ordinal: self.device.facts().ordinal,
            free: self.device.memory()?.free_bytes,
        })
    }

    /// cuBLASLt, where it may be used and is there.
    fn library(&self, options: &CudaOptions<'_>) -> Result<Option<CublasLt>, CudaEngineError> {
        if options.mode == Mode::Invariant || options.products == ProductChoice::Own {
            return Ok(None);
        }
        match CublasLt::open(&self.libraries, &self.device) {
            Ok(library) => Ok(Some(library)),
            Err(GemmError::Cuda(error)) => Err(error.into()),
            Err(error) => {
                tracing::warn!(%error, "products are computed by the own kernels, which are slower for long prompts");
                Ok(None)
            }
        }
    }

    fn target<'a>(&'a self, cache: Option<&'a KernelCache>) -> Result<Target<'a>, CudaEngineError> {
        Ok(Target::of(&self.libraries, &self.device, cache)?)
    }

    fn patience(&self, options: &CudaOptions<'_>) -> Patience {
        let usual = step_limit(options.limits, self.is_false);
        Patience::new(&self.device, options.step_limit.unwrap_or(usual))
    }

    fn kv_memory(
        &self,
        patience: &Patience,
        geometry: KvGeometry,
        blocks: u32,
    ) -> Result<(KvPool, Arc<KvMemory>), CudaEngineError> {
        let mut pool = None;
        let kv = KvMemory::on_device(geometry, blocks, |bytes| {
            let made = KvPool::new((&self.libraries, &self.device), patience.clone(), bytes);
            let made = made.map_err(|error| match error.is_out_of_memory() {
                true => KvMemoryError::OutOfMemory { bytes },
                false => KvMemoryError::Device(DeviceError(error.to_string())),
            })?;
            Ok(Box::new(pool.insert(made).clone()))
        })?;
        let pool = pool.ok_or(KvMemoryError::NoBlocks)?;
        Ok((pool, Arc::new(kv)))
    }

    fn load(
        &self,
        plan: WeightsPlan<'_>,
        kernels: &Kernels,
        progress: Option<&mut dyn FnMut(LoadProgress)>,
    ) -> Result<crate::weights::Weights, WorkError> {
        let on = Loading {
            device: &self.device,
            stream: &self.stream,
            kernels,
        };
        match progress {
            Some(progress) => load(plan, on, progress),
            None => load(plan, on, &mut |_| {}),
        }
    }

    fn choose_products(
        &self,
        forward: &Forward,
        library: &CublasLt,
        choice: ProductChoice,
    ) -> Result<Products, WorkError> {
        let trial = Trial {
            device: &self.device,
            stream: &self.stream,
            buffers: &forward.buffers,
            rows_max: forward.capacity.rows,
        };
        let choice = match (choice, self.is_false) {
            (ProductChoice::Measured, true) => ProductChoice::Library,
            (choice, _) => choice,
        };
        let jobs = forward.kinds_of_products();
        Products::choose(forward.kernels.clone(), library, trial, (choice, jobs.as_slice()))
    }
}
