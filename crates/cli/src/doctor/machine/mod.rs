//! Times of this machine: copies, launches, products, each as a median beside the floor that can be computed. Not run on hardware.
//!
//! On the false driver of the tests everything runs in small, so that this code is tested, and no figure is told.

mod bench;
mod copies;
mod launches;
mod products;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use cuda::Device;
use cuda::cublaslt::{CublasLt, GemmError};
use cuda_engine::kernels::cache::KernelCache;
use cuda_engine::kernels::{AttentionShape, ImageForm, Kernels, Target};

use self::bench::{Bench, Size};
use super::part::{Line, Part, run_apart, tell};
use super::step::{Figure, Row, StepReport};

/// It takes ten seconds on a GPU, and some more where the kernels are not compiled yet.
const LIMIT: Duration = Duration::from_secs(120);
/// Any attention does: the kernels that run here are the same for all.
const ATTENTION: (usize, usize, usize) = (64, 9, 3);
const FALSE_DRIVER: &str = "not measured: this is the false driver of the tests";

pub(super) fn check(device: u32) -> StepReport {
    run_apart(Part::Machine.command(device), LIMIT).step(Row::Machine)
}

/// Measures in this process and prints the figures.
///
/// # Errors
/// The GPU cannot be used.
pub(super) fn run_here(ordinal: u32) -> anyhow::Result<()> {
    let libraries = cuda_engine::libraries();
    let device = Device::open(&libraries, ordinal).context("the GPU cannot be opened")?;
    let form = ImageForm::of(device.facts());
    let cache = KernelCache::of_user(|name| std::env::var_os(name).map(PathBuf::from));
    let target = Target::of(&libraries, &device, cache.as_ref())?;
    let (head_dim, heads, kv_heads) = ATTENTION;
    let kernels = Kernels::load(&device, &target, AttentionShape::new(head_dim, heads, kv_heads)?)?;
    let library = match CublasLt::open(&libraries, &device) {
        Ok(library) => Some(library),
        // The first lines of the report say why.
        Err(GemmError::NoLibrary(_)) => None,
        Err(error) => return Err(error).context("cuBLASLt cannot be used"),
    };
    let bench = Bench::new(&device, &kernels, Size::of(form))?;
    // One after the other, so that a part that fails leaves the figures before it. Those of the false driver say nothing.
    let show = |figures: Vec<Figure>| match form {
        ImageForm::Ptx => Ok(()),
        ImageForm::Cubin => figures.into_iter().map(Line::Figure).try_for_each(|line| tell(&line)),
    };
    let (copies, rate) = copies::measure(&bench).context("copies")?;
    show(copies)?;
    show(launches::measure(&bench).context("launches")?)?;
    show(products::measure(&bench, library.as_ref(), rate).context("products")?)?;
    match form {
        ImageForm::Ptx => tell(&Line::NotRun(FALSE_DRIVER.to_owned())),
        ImageForm::Cubin => Ok(()),
    }
}
