//! `baton kernels`: the kernels of the GPU engine, compiled without a GPU.

use std::io::Write;
use std::path::PathBuf;

use anyhow::Context;
use clap::{Args, Subcommand};
use cuda::nvrtc::Arch;
use cuda_engine::kernels::cache::KernelCache;
use cuda_engine::kernels::{ImageForm, Target, Unit, sources_sha256};
use model_files::gguf::hex;

use crate::exit::{Exit, WithExit as _};
use crate::terminal::say;

const EXAMPLES: &str = "\
Examples:
  pip install nvidia-cuda-nvrtc                        the compiler: 90 MB, needs no GPU
  baton kernels build --arch sm_90a                    for an H100 or H200, into the cache
  baton kernels build --arch sm_80,sm_90a --out FOLDER for an image: BATON_KERNEL_CACHE=FOLDER

The compiler is found in the active virtual environment, in toolkits, and in the folders of BATON_CUDA_PATH.
`baton doctor --gpu --loader-only` says which one is taken. The code has not been run on hardware yet.
Exit status: 0 everything is compiled, 1 a kernel does not compile or spills registers, 5 there is no compiler.";

#[derive(Debug, Args)]
pub struct KernelsArgs {
    #[command(subcommand)]
    verb: KernelsVerb,
}

#[derive(Debug, Subcommand)]
enum KernelsVerb {
    /// Compile every kernel for GPUs that need not be here, and say which registers each takes. The first line names the sources and the compiler.
    Build(BuildArgs),
}

#[derive(Debug, Args)]
#[command(before_help = EXAMPLES)]
struct BuildArgs {
    /// Architectures: sm_80 (A100), sm_89 (L4, RTX 40), sm_90a (H100, H200), sm_100a (B200), sm_120 (RTX 50).
    #[arg(long, required = true, value_delimiter = ',', value_name = "ARCH")]
    arch: Vec<Arch>,
    /// The folder for the compiled kernels, instead of the user's cache.
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
}

/// # Errors
/// There is no compiler, or a kernel is not as it should be.
pub fn run(args: &KernelsArgs) -> anyhow::Result<Exit> {
    let KernelsVerb::Build(args) = &args.verb;
    let of_user = || KernelCache::of_user(|name| std::env::var_os(name).map(PathBuf::from));
    let cache = args.out.clone().map(KernelCache::at).or_else(of_user);
    let cache = cache
        .context("no folder for the kernels: set HOME or give --out")
        .exit(Exit::Usage)?;
    let libraries = cuda_engine::libraries();
    let mut out = crate::stdout::stdout();
    let compiler = libraries
        .nvrtc_version()
        .map_or_else(String::new, |version| format!(", NVRTC {version}"));
    writeln!(out, "sources {}{compiler}", hex(&sources_sha256()))?;
    for arch in &args.arch {
        let target = Target::new(&libraries, (*arch, ImageForm::Cubin), Some(&cache)).exit(Exit::NoVerdict)?;
        for unit in Unit::all() {
            for line in target.build(unit)? {
                writeln!(out, "{line}")?;
            }
        }
    }
    say!("compiled into {}", cache.folder().display());
    Ok(Exit::Ok)
}
