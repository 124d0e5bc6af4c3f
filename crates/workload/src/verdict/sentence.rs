//! The words of a verdict: they name percentile, load and shape, and say no more than the intervals do.

use crate::comparison::{Arm, ArmKind, Comparison, Contrast, Finding, Shape, Slo};
use crate::record::LoopKind;

use super::{Judged, Metric};

/// One sentence for each candidate, and for each stretch of loads at which its finding is the same.
pub(super) fn verdict(comparison: &Comparison, shape: &Shape, judged: &[Judged], relevant_share: f64) -> String {
    let mut sentences = Vec::new();
    for candidate in &comparison.arms {
        let primary = judged
            .iter()
            .filter(|judged| judged.is_primary && judged.contrast.candidate == candidate.name);
        let primary: Vec<&Judged> = primary.collect();
        for stretch in primary.chunk_by(|a, b| a.contrast.finding == b.contrast.finding) {
            let words = Words {
                comparison,
                shape,
                candidate,
                stretch,
                judged,
                relevant_share,
            };
            sentences.push(words.sentence());
        }
    }
    if sentences.is_empty() {
        return "No verdict: there is no second arm, or no run of it.".to_owned();
    }
    sentences.join(" ")
}

struct Words<'a> {
    comparison: &'a Comparison,
    shape: &'a Shape,
    candidate: &'a Arm,
    /// Primary contrasts at neighbouring loads, rising, with the same finding. Never empty.
    stretch: &'a [&'a Judged],
    judged: &'a [Judged],
    relevant_share: f64,
}

impl Words<'_> {
    fn sentence(&self) -> String {
        let quoted = self.stretch[self.stretch.len() - 1];
        let contrast = &quoted.contrast;
        let (candidate, baseline) = (self.named(&contrast.candidate), self.named(&contrast.baseline));
        let place = format!("at {} of {}", self.loads(), self.shape.name);
        let is_split = matches!(self.candidate.kind, ArmKind::Disaggregated | ArmKind::Conditional);
        let head = match contrast.finding {
            // Each sentence begins with a capital letter, and the names of arms do not: the report cuts there.
            Finding::Wins => format!("Here {candidate} wins against {baseline} {place}"),
            Finding::Loses if is_split => {
                format!("Do not disaggregate here: {place}, {candidate} loses against {baseline}")
            }
            Finding::Loses => format!("Here {candidate} loses against {baseline} {place}"),
            Finding::NoDifferenceShown => {
                format!("No difference shown between {candidate} and {baseline} {place}")
            }
        };
        let at = match self.stretch.len() {
            1 => String::new(),
            _ => format!(" (figures at {})", self.load(contrast.load)),
        };
        let mut parts = vec![format!(
            "{}{}{}",
            figures(quoted),
            within(&self.comparison.slo, quoted),
            alone(quoted)
        )];
        let others = self.judged.iter().filter(|other| {
            let other = &other.contrast;
            other.candidate == contrast.candidate && other.load == contrast.load && other.metric != contrast.metric
        });
        parts.extend(others.map(|other| format!("{} {}", figures(other), finding_words(other))));
        format!("{head}{at}: {}{}.", parts.join("; "), self.equal_within(contrast))
    }
    /// Not to show a difference is less than to show that there is none.
    fn equal_within(&self, contrast: &Contrast) -> String {
        let most = 1.0 + self.relevant_share;
        if contrast.ratio_low < 1.0 / most || contrast.ratio_high > most {
            return String::new();
        }
        format!(
            ". The interval rules out a difference of more than {} %",
            figure(self.relevant_share * 100.0)
        )
    }
    fn named(&self, name: &str) -> String {
        let arm = self.comparison.arms.iter().find(|arm| arm.name == name);
        match arm.filter(|arm| arm.topology != arm.name) {
            Some(arm) => format!("{name} ({})", arm.topology),
            None => name.to_owned(),
        }
    }
    fn loads(&self) -> String {
        let (low, high) = (
            self.stretch[0].contrast.load,
            self.stretch[self.stretch.len() - 1].contrast.load,
        );
        if self.stretch.len() == 1 {
            return self.load(high);
        }
        format!("{} to {}", figure(low), self.load(high))
    }
    fn load(&self, load: f64) -> String {
        let kind = self.shape.runs.first().map(|run| run.run.loop_kind);
        let unit = match kind {
            Some(LoopKind::Closed) => "users at a time",
            Some(LoopKind::Simulated) => "simulated requests/s",
            _ => "requests/s",
        };
        format!("{} {unit}", figure(load))
    }
}

/// `goodput per core is 0.67 times (95 % interval 0.6 to 0.75): 0.4 against 0.6 requests/s`.
fn figures(judged: &Judged) -> String {
    let Contrast {
        ratio,
        ratio_low,
        ratio_high,
        candidate_value,
        baseline_value,
        ..
    } = &judged.contrast;
    format!(
        "{} is {} times (95 % interval {} to {}), {} against {} {}",
        judged.metric.words(),
        figure(*ratio),
        figure(*ratio_low),
        figure(*ratio_high),
        figure(*candidate_value),
        figure(*baseline_value),
        judged.metric.unit(),
    )
}

/// What makes a request count, where the metric is a goodput.
fn within(slo: &Slo, judged: &Judged) -> String {
    let is_goodput = matches!(
        judged.metric,
        Metric::Goodput | Metric::GoodputPerCore | Metric::GoodputPerGpu
    );
    if !is_goodput {
        return String::new();
    }
    format!(
        ", of requests with a TTFT of at most {} ms and a p99 of their own gaps of at most {} ms",
        figure(slo.ttft_ms_max),
        figure(slo.itl_ms_max)
    )
}

/// A reader who sees only the interval of the deciding figure would call it a difference.
fn alone(judged: &Judged) -> &'static str {
    match judged.contrast.finding {
        Finding::NoDifferenceShown if excludes_one(&judged.contrast) => {
            " (this interval alone leaves out 1, but all arms and loads judged together do not show a difference of a relevant size)"
        }
        _ => "",
    }
}

fn excludes_one(contrast: &Contrast) -> bool {
    contrast.ratio_low > 1.0 || contrast.ratio_high < 1.0
}

fn finding_words(judged: &Judged) -> &'static str {
    match judged.contrast.finding {
        Finding::Wins => "(better)",
        Finding::Loses => "(worse)",
        // A reader who sees only the interval would call it a difference.
        Finding::NoDifferenceShown if excludes_one(&judged.contrast) => {
            "(no difference shown by the rules for secondary figures)"
        }
        Finding::NoDifferenceShown => "(no difference shown)",
    }
}

/// Three significant digits, without zeros at the end.
fn figure(value: f64) -> String {
    if value == 0.0 || !value.is_finite() {
        return value.to_string();
    }
    let digits = 2 - value.abs().log10().floor() as i32;
    let text = format!("{value:.*}", digits.clamp(0, 9) as usize);
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_has_three_digits() {
        for (value, text) in [
            (0.0, "0"),
            (0.6666, "0.667"),
            (1903.9, "1904"),
            (12.0, "12"),
            (0.012345, "0.0123"),
            (2.5, "2.5"),
        ] {
            assert_eq!(figure(value), text);
        }
    }
}
