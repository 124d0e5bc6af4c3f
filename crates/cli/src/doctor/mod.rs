//! `baton doctor`: looks at this machine and says what serves, what does not, and why. It looks at the GPU only so far: the
//! libraries, and each kernel against the host.

mod kernel_group;
mod report;

use std::fs;
use std::io::Write;
use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use cuda::loader::DriverDecision;
use cuda::{Device, Libraries, LoaderReport};
use cuda_engine::kernels::check::Group;
use cuda_engine::kernels::{Target, Unit};

use self::kernel_group::GroupReport;
use self::report::GpuReport;
use crate::exit::{Exit, WithExit as _};
use crate::terminal::say;

const EXAMPLES: &str = "\
Examples:
  baton doctor --gpu                       the libraries that are found, and every kernel against the CPU
  baton doctor --gpu --device 1            the second visible GPU
  baton doctor --gpu --report gpu.md       also as a page to paste into an issue
  baton doctor --gpu --loader-only         only the libraries and the GPUs: 0.1 s

No part of the GPU engine has been run on hardware yet: please report what this prints.
Exit status: 0 everything is right, 1 a kernel is wrong or cannot run, 5 nothing was checked: no GPU or no compiler.";

#[derive(Debug, Args)]
#[command(before_help = EXAMPLES)]
pub struct DoctorArgs {
    /// Look at the GPU. There is nothing else to look at yet.
    #[arg(long, required = true)]
    gpu: bool,
    /// The number of the GPU among the visible ones.
    #[arg(long, default_value_t = 0, value_name = "N")]
    device: u32,
    /// Only search libraries and GPUs; run no kernel.
    #[arg(long)]
    loader_only: bool,
    /// The kernels are checked with random numbers of this seed.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Write the result as a page in Markdown, with everything as JSON at its end.
    #[arg(long, value_name = "FILE", conflicts_with = "kernel_group")]
    report: Option<PathBuf>,
    /// Print one JSON object instead of text.
    #[arg(long)]
    json: bool,
    /// Run one group of checks in this process and print its outcomes. The command starts itself with it.
    #[arg(long, hide = true, value_name = "GROUP", value_parser = group)]
    kernel_group: Option<Group>,
}

fn group(name: &str) -> Result<Group, String> {
    let found = Group::ALL.into_iter().find(|group| group.name() == name);
    found.ok_or_else(|| "no such group of kernels".to_owned())
}

/// # Errors
/// This program cannot start itself, or the report cannot be written.
pub fn run(args: &DoctorArgs) -> anyhow::Result<Exit> {
    if let Some(group) = args.kernel_group {
        return kernel_group::run_here(group, args.device, args.seed);
    }
    let libraries = cuda_engine::libraries();
    let loader = libraries.report();
    if loader.is_ready()
        && !args.loader_only
        && let Err(error) = check_possible(&libraries, args.device)
    {
        say!("{loader}");
        return Err(error).exit(Exit::NoVerdict);
    }
    let kernels = match loader.is_ready() && !args.loader_only {
        true => check_kernels(args)?,
        false => Vec::new(),
    };
    let exit = exit_of(loader, &kernels, args.loader_only);
    let report = GpuReport::new(&libraries, args.device, kernels);
    let mut out = std::io::stdout().lock();
    match args.json {
        true => writeln!(out, "{}", serde_json::to_string(&report)?)?,
        false => write!(out, "{report}")?,
    }
    if let Some(file) = &args.report {
        fs::write(file, report.page()?).with_context(|| format!("cannot write {}", file.display()))?;
    }
    Ok(exit)
}

/// Whether there are kernels for this GPU, and a compiler that knows it.
fn check_possible(libraries: &Libraries, ordinal: u32) -> anyhow::Result<()> {
    let device = Device::open(libraries, ordinal).with_context(|| format!("GPU {ordinal} cannot be opened"))?;
    let target = Target::of(libraries, &device, None)?;
    let first = Unit::all().into_iter().next().context("there are no kernels")?;
    target.build(first)?;
    Ok(())
}

fn check_kernels(args: &DoctorArgs) -> anyhow::Result<Vec<GroupReport>> {
    let groups = Group::ALL.into_iter().map(|group| {
        say!("checking the kernels of group {} ...", group.name());
        kernel_group::run_apart(group, args.device, args.seed)
    });
    groups.collect()
}

fn exit_of(loader: &LoaderReport, kernels: &[GroupReport], is_loader_only: bool) -> Exit {
    let has_gpu = matches!(loader.driver, DriverDecision::Ready { .. });
    match () {
        () if kernels.iter().any(|group| !group.is_right()) => Exit::Failure,
        () if !loader.is_ready() || (is_loader_only && !has_gpu) => Exit::NoVerdict,
        () => Exit::Ok,
    }
}
