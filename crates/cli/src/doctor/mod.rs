//! `baton doctor`: looks at this machine and says what serves, what does not, and why. `host` looks at what every cluster needs.
//! The rest is `--gpu`: the libraries, each kernel against the host, times, the handoff between two processes, the tokens of a
//! model. Each of these steps runs in processes of its own, with a deadline.

mod child;
mod handoff;
mod host;
mod kernel_group;
mod machine;
mod model;
mod part;
mod pattern;
mod report;
mod sanitize;
mod step;
mod tables;

use std::fs;
use std::io::Write;
use std::path::PathBuf;

use anyhow::Context;
use clap::{Args, ValueEnum};
use cuda::loader::DriverDecision;
use cuda::{Device, Libraries, LoaderReport};
use cuda_engine::kernels::check::Group;
use cuda_engine::kernels::{ImageForm, Target, Unit};
use model_files::model::Model;

use self::kernel_group::{GroupReport, Shapes};
use self::part::Part;
use self::report::GpuReport;
use self::sanitize::Sanitizer;
use self::step::{Row, Step, StepReport};
use crate::exit::{Exit, WithExit as _};
use crate::stdout::unless_reader_gone;
use crate::terminal::say;

const EXAMPLES: &str = "\
Examples:
  baton doctor                             cores, memory, model, ports, etcd, collector: what is wrong and what to do
  baton doctor --model ./my.gguf --listen 127.0.0.1:8001 --membership etcds://10.0.0.1:2379/demo
  baton doctor --json | jq -r '.checks[] | select(.verdict == \"fail\") | .to_do'
  baton doctor --gpu                       libraries, every kernel against the CPU, times, and the handoff between two processes
  baton doctor --gpu --model model.gguf    also the tokens of this model against the CPU
  baton doctor --gpu --only kernels        one step; --skip machine,handoff leaves steps out
  baton doctor --gpu --sanitize            also the kernels under NVIDIA's compute-sanitizer: many minutes
  baton doctor --gpu --device 1            the second visible GPU
  baton doctor --gpu --report gpu.md       also as a page to paste into an issue
  baton doctor --gpu --loader-only         only the libraries and the GPUs: 0.1 s

No part of the GPU engine has been run on hardware yet: please report what this prints.
Exit status: 0 nothing has failed, 1 something is wrong or did not end, 5 with --gpu: nothing was checked, no GPU or no compiler.";

const LOADER_ONLY: &str = "--loader-only";
const NOT_READY: &str = "no GPU, or no compiler for its kernels: the first lines say what is missing";
const LEFT_OUT: &str = "left out by --only or --skip";

#[derive(Debug, Args)]
#[command(before_help = EXAMPLES)]
pub struct DoctorArgs {
    /// The model to look at, as --model of `baton up` [default: smollm2-135m]. With --gpu, a file: compare its tokens with those
    /// of the CPU, which needs its weights as f32 in memory.
    #[arg(long, value_name = "PATH|NAME")]
    model: Option<PathBuf>,
    /// Where `baton up` would listen.
    #[arg(
        long,
        default_value = "127.0.0.1:8000",
        value_name = "HOST:PORT",
        conflicts_with = "gpu"
    )]
    listen: String,
    /// The etcd of the cluster: etcds://HOST:PORT/CLUSTER [default: that of BATON_COORDINATORS, if it names one].
    #[arg(long, env = "BATON_MEMBERSHIP", hide_env_values = true, value_name = "ETCD")]
    membership: Option<String>,
    /// Look at the GPU: libraries, every kernel against the CPU, times, the handoff between two processes.
    #[arg(long)]
    gpu: bool,
    /// With --gpu: the number of the GPU among the visible ones.
    #[arg(long, default_value_t = 0, value_name = "N", requires = "gpu")]
    device: u32,
    /// With --gpu: only search libraries and GPUs; run nothing.
    #[arg(long, requires = "gpu", conflicts_with_all = ["only", "skip", "sanitize"])]
    loader_only: bool,
    /// With --gpu: run these steps only.
    #[arg(
        long,
        requires = "gpu",
        value_enum,
        value_delimiter = ',',
        value_name = "STEP,..",
        conflicts_with = "skip"
    )]
    only: Vec<Step>,
    /// With --gpu: run all steps but these.
    #[arg(long, requires = "gpu", value_enum, value_delimiter = ',', value_name = "STEP,..")]
    skip: Vec<Step>,
    /// With --gpu: run the kernels under compute-sanitizer, too (pip install nvidia-cuda-sanitizer-api).
    #[arg(long, requires = "gpu")]
    sanitize: bool,
    /// With --gpu: the kernels are checked with random numbers of this seed.
    #[arg(long, default_value_t = 1, requires = "gpu")]
    seed: u64,
    /// With --gpu: write the result as a page in Markdown, with everything as JSON at its end.
    #[arg(long, value_name = "FILE", requires = "gpu", conflicts_with_all = ["kernel_group", "part"])]
    report: Option<PathBuf>,
    /// Print one JSON object instead of text.
    #[arg(long)]
    json: bool,
    /// Run one group of checks in this process and print its outcomes. The command starts itself with it.
    #[arg(long, hide = true, value_name = "GROUP", value_parser = group)]
    kernel_group: Option<Group>,
    /// Of the group: one shape of each kernel.
    #[arg(long, hide = true, requires = "kernel_group")]
    small: bool,
    /// Be one process of a step. The command starts itself with it.
    #[arg(long, hide = true, value_enum, conflicts_with = "kernel_group")]
    part: Option<Part>,
    /// Of the part: the GPU of the second rank.
    #[arg(long, hide = true, requires = "part", value_name = "N")]
    peer_device: Option<u32>,
}

fn group(name: &str) -> Result<Group, String> {
    let found = Group::ALL.into_iter().find(|group| group.name() == name);
    found.ok_or_else(|| "no such group of kernels".to_owned())
}

impl DoctorArgs {
    fn wants(&self, step: Step) -> bool {
        (self.only.is_empty() || self.only.contains(&step)) && !self.skip.contains(&step)
    }

    fn shapes(&self) -> Shapes {
        match self.small {
            true => Shapes::Small,
            false => Shapes::All,
        }
    }
}

/// The GPU that is looked at.
#[derive(Clone, Copy, Debug)]
struct Gpu {
    ordinal: u32,
    /// All visible ones.
    visible: u32,
    form: ImageForm,
}

/// # Errors
/// What was asked for is not there, or the report cannot be written.
pub fn run(args: &DoctorArgs) -> anyhow::Result<Exit> {
    if !args.gpu {
        return host::run(args);
    }
    if let Some(group) = args.kernel_group {
        // A small one is a child of the sanitizer, whose thread that starts it may end before it does.
        if !args.small {
            end_with_the_command()?;
        }
        return kernel_group::run_here(group, args.shapes(), (args.device, args.seed));
    }
    if let Some(part) = args.part {
        return run_part(part, args);
    }
    let libraries = cuda_engine::libraries();
    let found = match (args.loader_only, libraries.report().is_ready()) {
        (true, _) => (Vec::new(), none(LOADER_ONLY)),
        (false, false) => (Vec::new(), none(NOT_READY)),
        (false, true) => look(args, &libraries)?,
    };
    let report = GpuReport::new(&libraries, args.device, found);
    let mut out = crate::stdout::stdout();
    unless_reader_gone(match args.json {
        true => writeln!(out, "{}", serde_json::to_string(&report)?),
        false => write!(out, "{report}"),
    })?;
    if let Some(file) = &args.report {
        fs::write(file, report.page()?).with_context(|| format!("cannot write {}", file.display()))?;
    }
    Ok(exit_of(libraries.report(), report.steps(), args.loader_only))
}

/// Looks at the GPU, when everything is there that was asked for.
fn look(args: &DoctorArgs, libraries: &Libraries) -> anyhow::Result<(Vec<GroupReport>, Vec<StepReport>)> {
    let gpu = check_possible(libraries, args.device).inspect_err(|_| say!("{}", libraries.report()));
    let gpu = gpu.exit(Exit::NoVerdict)?;
    if let Some(model) = args.model.as_deref().filter(|_| args.wants(Step::Model)) {
        let opened = Model::open(model).with_context(|| format!("{} is no model", model.display()));
        opened.exit(Exit::Usage)?;
    }
    let sanitizer = Sanitizer::find(args.sanitize, gpu.form).exit(Exit::NoVerdict)?;
    Ok(run_steps(args, libraries.report(), (&gpu, &sanitizer)))
}

/// Whether there are kernels for this GPU, and a compiler that knows it.
fn check_possible(libraries: &Libraries, ordinal: u32) -> anyhow::Result<Gpu> {
    let device = Device::open(libraries, ordinal).with_context(|| format!("GPU {ordinal} cannot be opened"))?;
    let target = Target::of(libraries, &device, None)?;
    let first = Unit::all().into_iter().next().context("there are no kernels")?;
    target.build(first)?;
    let visible = match libraries.report().driver {
        DriverDecision::Ready { devices, .. } => devices,
        _ => 0,
    };
    let form = ImageForm::of(device.facts());
    Ok(Gpu { ordinal, visible, form })
}

/// Every step, with one reason why it was not run.
fn none(why: &str) -> Vec<StepReport> {
    let rows = Step::value_variants().iter().flat_map(|step| step.rows());
    let rows = rows.copied().chain([Row::Sanitize]);
    rows.map(|row| StepReport::not_run(row, why)).collect()
}

fn run_steps(
    args: &DoctorArgs,
    loader: &LoaderReport,
    (gpu, sanitizer): (&Gpu, &Sanitizer),
) -> (Vec<GroupReport>, Vec<StepReport>) {
    let (mut kernels, mut steps) = (Vec::new(), Vec::new());
    for step in Step::value_variants() {
        if !args.wants(*step) {
            steps.extend(step.rows().iter().map(|row| StepReport::not_run(*row, LEFT_OUT)));
            continue;
        }
        match step {
            Step::Kernels => {
                kernels = check_kernels(args);
                steps.push(kernel_group::step_of(&kernels));
            }
            Step::Machine => {
                say!("measuring copies, launches and products ...");
                steps.push(machine::check(gpu.ordinal));
            }
            Step::Handoff => {
                say!("handing memory over between two processes, and killing one of them ...");
                steps.extend(handoff::check(gpu, &loader.nccl));
            }
            Step::Model => {
                if args.model.is_some() {
                    say!("computing tokens on the GPU and on the CPU ...");
                }
                steps.push(model::check(args.model.as_deref(), gpu.ordinal));
            }
        }
    }
    steps.push(sanitizer.check(gpu.ordinal, args.seed));
    (kernels, steps)
}

fn check_kernels(args: &DoctorArgs) -> Vec<GroupReport> {
    let groups = Group::ALL.into_iter().map(|group| {
        say!("checking the kernels of group {} ...", group.name());
        kernel_group::run_apart(group, args.device, args.seed)
    });
    groups.collect()
}

/// A process of a step that outlives the command would keep the GPU.
fn end_with_the_command() -> anyhow::Result<()> {
    #[cfg(target_os = "linux")]
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
        .context("cannot tie this process's life to that of the command")?;
    Ok(())
}

/// Is one process of a step.
fn run_part(part: Part, args: &DoctorArgs) -> anyhow::Result<Exit> {
    end_with_the_command()?;
    let device = args.device;
    match part {
        Part::Machine => machine::run_here(device)?,
        Part::Ipc => handoff::own_here(device)?,
        Part::IpcPeer => handoff::open_here(device)?,
        Part::Nccl => handoff::first_here((device, args.peer_device.unwrap_or(device)))?,
        Part::NcclPeer => handoff::second_here(device)?,
        Part::Model => {
            let model = args.model.as_deref().context("the part has no model")?;
            model::run_here(model, device)?;
        }
    }
    Ok(Exit::Ok)
}

fn exit_of(loader: &LoaderReport, steps: &[StepReport], is_loader_only: bool) -> Exit {
    match () {
        () if steps.iter().any(StepReport::is_wrong) => Exit::Failure,
        () if !loader.is_ready() => Exit::NoVerdict,
        () if is_loader_only || steps.iter().any(StepReport::is_good) => Exit::Ok,
        () => Exit::NoVerdict,
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        doctor: DoctorArgs,
    }

    fn args(words: &[&str]) -> DoctorArgs {
        let mut line = vec!["doctor", "--gpu"];
        line.extend(words);
        Line::try_parse_from(line).expect("a command line").doctor
    }

    #[test]
    fn steps_are_chosen_by_name() {
        let wanted = |words: &[&str]| {
            let args = args(words);
            let all = Step::value_variants().iter().copied();
            all.filter(|step| args.wants(*step)).collect::<Vec<Step>>()
        };
        assert_eq!(wanted(&[]).len(), 4);
        assert_eq!(wanted(&["--only", "kernels,model"]), [Step::Kernels, Step::Model]);
        assert_eq!(wanted(&["--skip", "machine,handoff"]), [Step::Kernels, Step::Model]);
        let both = ["doctor", "--gpu", "--only", "model", "--skip", "model"];
        assert!(Line::try_parse_from(both).is_err());
    }

    #[test]
    fn what_is_of_the_gpu_needs_its_flag() {
        for words in [
            &["doctor", "--only", "model"][..],
            &["doctor", "--device", "1"],
            &["doctor", "--sanitize"],
        ] {
            assert!(Line::try_parse_from(words).is_err(), "{words:?}");
        }
        let line = Line::try_parse_from(["doctor", "--json", "--membership", "etcd://h:1/c"]).expect("a command line");
        assert!(!line.doctor.gpu && line.doctor.json);
    }

    #[test]
    fn a_step_that_was_not_run_is_no_verdict() {
        let not_run = none(LEFT_OUT);
        assert_eq!(not_run.len(), 6);
        assert!(!not_run.iter().any(StepReport::is_good));
        assert!(!not_run.iter().any(StepReport::is_wrong));
    }

    #[test]
    fn each_part_is_started_by_the_words_that_it_is_known_by() {
        for part in Part::value_variants() {
            let command = part.command(3).expect("this program");
            let words: Vec<String> = command
                .get_args()
                .map(|word| word.to_string_lossy().into_owned())
                .collect();
            let words: Vec<&str> = words.iter().skip(2).map(String::as_str).collect();
            let parsed = args(&words);
            assert_eq!((parsed.part, parsed.device), (Some(*part), 3));
        }
    }
}
