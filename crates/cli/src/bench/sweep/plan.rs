//! The settings of a sweep, and the load that each of them is.

use workload::arrivals::{Arrivals, Rate};
use workload::shapes::named::USERS;
use workload::shapes::{Length, Mix};
use workload::trace::Trace;
use workload::trace::scaling::Scaling;

use super::SweepArgs;
use crate::bench::load::plan::{LoadPlan, Pace};
use crate::bench::load::traffic::recorded;
use crate::bench::measure::leave_out_edges;
use crate::exit::{Exit, WithExit as _};

/// Of one run, as --num-prompts has it.
const REQUESTS_MAX: u32 = 1_000_000;
/// The shortest run of a rate, as the help of --seconds has it.
const SECONDS: f64 = 10.0;
/// The burstiness of a Poisson process, as the help of --burstiness has it.
const POISSON: f64 = 1.0;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Load {
    Users(u32),
    /// Requests a second.
    Rate(f64),
}

impl Load {
    pub fn is_below(self, other: Load) -> bool {
        matches!((self, other), (Load::Rate(one), Load::Rate(other)) if one < other)
    }
    /// By which the loads of one sweep are sorted. They are of one kind.
    pub fn amount(self) -> f64 {
        match self {
            Load::Users(users) => f64::from(users),
            Load::Rate(rate) => rate,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Setting {
    pub load: Load,
    pub prompt_tokens: u32,
    pub output_tokens: u32,
}

impl Setting {
    /// The loads are those of the flags. Without any they are the usual users; beside several lengths it is one user, so that
    /// one knob changes.
    pub fn all(args: &SweepArgs) -> Vec<Setting> {
        let users = |users: &[u32]| users.iter().copied().map(Load::Users).collect::<Vec<_>>();
        let lengths = args.random_input_len.len() * args.random_output_len.len();
        let loads = match (args.rates.is_empty(), args.users.is_empty()) {
            (false, _) => args.rates.iter().copied().map(Load::Rate).collect(),
            (true, false) => users(&args.users),
            (true, true) if lengths > 1 => vec![Load::Users(1)],
            (true, true) => users(&USERS),
        };
        let mut settings = Vec::new();
        for prompt_tokens in args.random_input_len.iter().copied() {
            for output_tokens in args.random_output_len.iter().copied() {
                settings.extend(loads.iter().map(|load| Setting {
                    load: *load,
                    prompt_tokens,
                    output_tokens,
                }));
            }
        }
        settings
    }
    pub fn first(args: &SweepArgs) -> Setting {
        let first = |lengths: &[u32]| lengths.first().copied().unwrap_or(1);
        Setting {
            load: Load::Users(1),
            prompt_tokens: first(&args.random_input_len),
            output_tokens: first(&args.random_output_len),
        }
    }
    /// Prompt tokens and output tokens.
    pub fn shape(&self) -> (u32, u32) {
        (self.prompt_tokens, self.output_tokens)
    }
    pub fn is_same_shape(&self, other: &Setting) -> bool {
        self.shape() == other.shape()
    }
    pub fn label(&self, args: &SweepArgs) -> String {
        let load = match self.load {
            Load::Users(1) => "1 user".to_owned(),
            Load::Users(users) => format!("{users} users"),
            Load::Rate(rate) => format!("{rate:.3} req/s"),
        };
        match args.random_input_len.len() * args.random_output_len.len() {
            1 => load,
            _ => format!("{load}, {}/{} tokens", self.prompt_tokens, self.output_tokens),
        }
    }
    /// The first requests of the trace file, or made ones.
    fn trace(&self, args: &SweepArgs, requests: u32) -> anyhow::Result<Trace> {
        if let Some(path) = &args.dataset_path {
            let scaling = Scaling {
                length_divisor: args.length_scale.unwrap_or(1),
                requests_max: Some(requests as usize),
                context_tokens_max: args.context_len,
                ..Scaling::default()
            };
            return recorded(path, &scaling);
        }
        let length = |tokens| Length {
            tokens,
            range_ratio: args.random_range_ratio,
        };
        let mix = Mix::one(length(self.prompt_tokens), length(self.output_tokens));
        Ok(mix.trace(requests as usize, args.server.seed)?)
    }
    /// # Errors
    /// Lengths or rates that are impossible, or a trace that cannot be read.
    pub fn plan(&self, args: &SweepArgs) -> anyhow::Result<LoadPlan> {
        let requests = match self.load {
            Load::Users(_) => args.num_prompts,
            Load::Rate(rate) => {
                let requests = (rate * args.seconds.unwrap_or(SECONDS))
                    .ceil()
                    .min(f64::from(REQUESTS_MAX));
                args.num_prompts.max(requests as u32)
            }
        };
        let arrivals = match self.load {
            Load::Users(_) => Arrivals::AtOnce,
            Load::Rate(rate) => Arrivals::Gamma {
                rate: Rate::Fixed(rate),
                burstiness: args.burstiness.unwrap_or(POISSON),
            },
        };
        let trace = self.trace(args, requests).exit(Exit::Usage)?;
        let trace = arrivals.apply(trace, args.server.seed).exit(Exit::Usage)?;
        let mut plan = args.server.plan(trace);
        plan.name = self.label(args);
        match self.load {
            Load::Users(users) => plan.pace = Pace::Closed { users },
            Load::Rate(rate) => leave_out_edges(&mut plan, rate)?,
        }
        Ok(plan)
    }
}
