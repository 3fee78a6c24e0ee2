//! Options of the commands that map images to block devices.

use clap::{ArgMatches, Args, Command, FromArgMatches, Subcommand, ValueEnum};

use super::OneImage;
use super::names::{NameArgs, read_by_way_of};
use crate::ops::MappedTarget;

/// Kind of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DeviceType {
    /// A device of the kernel's NBD client.
    Nbd,
}

/// Option that selects the kind of a device, as rbd takes it.
#[derive(Debug, Args)]
pub struct DeviceTypeArgs {
    /// The kind of device: those of the kernel's NBD client
    #[arg(short = 't', long, value_enum, value_name = "TYPE", default_value = "nbd")]
    pub device_type: DeviceType,
}

/// Options of `map`.
#[derive(Debug, Args)]
pub struct MapArgs {
    /// The image.
    #[command(flatten)]
    pub name: OneImage,

    /// Refuse writes
    #[arg(long)]
    pub read_only: bool,

    /// Connections of the device to the daemon, from 1 to 16
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=16))]
    pub nbd_connections: u32,

    /// Seconds after which the kernel sends a request without a reply again, over another connection or a new one.  With
    /// 0 it never gives a single connection up, and looks every 30 s whether that was replaced.  At most 86400
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    pub timeout: u64,

    /// Seconds for which requests wait while the daemon does not run; then they fail.  At most 2592000
    #[arg(long, alias = "reattach-timeout", value_name = "SECONDS", default_value_t = 600)]
    pub reconnect_timeout: u64,

    /// The kind of device.
    #[command(flatten)]
    pub device_type: DeviceTypeArgs,
}

/// Options of `unmap`.
#[derive(Debug, Args)]
pub struct UnmapArgs {
    /// The image or device.
    #[command(flatten)]
    pub target: MappedOperand,

    /// End a device that is in use or not connected: what was not flushed is lost, and requests in flight fail
    #[arg(short, long)]
    pub force: bool,

    /// The kind of device.
    #[command(flatten)]
    pub device_type: DeviceTypeArgs,
}

/// Mapped image, by its name or its device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MappedOperand {
    /// The image or device.
    pub target: MappedTarget,
}

/// Arguments before validation.
#[derive(Debug, Args)]
struct TypedMapped {
    /// The image, POOL/IMAGE, or its device, /dev/nbdN
    #[arg(value_name = "IMAGE|DEVICE")]
    spec: Option<String>,
    #[command(flatten)]
    options: NameArgs,
}

impl TryFrom<TypedMapped> for MappedOperand {
    type Error = String;

    fn try_from(TypedMapped { spec, options }: TypedMapped) -> Result<Self, String> {
        let device = spec.as_ref().filter(|spec| spec.starts_with("/dev/") && !options.has_image());
        let target = match device {
            Some(device) => MappedTarget::Device(device.clone()),
            None => MappedTarget::Image(options.required(spec.as_deref())?),
        };
        Ok(Self { target })
    }
}

read_by_way_of!(TypedMapped => MappedOperand);

/// Commands on mapped images, as rbd also has them.
#[derive(Debug, Subcommand)]
pub enum MappedDeviceCommand {
    /// Map an image to a block device of this machine: 'forebay map'
    #[command(after_help = "Example:\n  forebay device map local/disk1")]
    Map(MapArgs),

    /// End the block device of a mapped image: 'forebay unmap'
    #[command(after_help = "Example:\n  forebay device unmap local/disk1")]
    Unmap(UnmapArgs),

    /// List the mapped images: 'forebay showmapped'
    #[command(visible_alias = "ls", after_help = "Example:\n  forebay device list")]
    List(DeviceTypeArgs),
}

#[cfg(test)]
mod tests {
    use super::super::names::tests::read;
    use super::*;

    #[test]
    fn an_image_or_its_device() {
        let target = |arguments: &[&str]| read::<MappedOperand>(arguments).map(|read| read.target);
        let image = |text: &str| Ok(MappedTarget::Image(text.parse().expect("a spec")));
        assert_eq!(target(&["/dev/nbd0"]), Ok(MappedTarget::Device("/dev/nbd0".into())));
        assert_eq!(target(&["rbd/x"]), image("rbd/x"));
        assert_eq!(target(&["-p", "rbd", "x"]), image("rbd/x"));
        assert_eq!(target(&["-p", "rbd", "--image", "x"]), image("rbd/x"));
        assert!(target(&["/dev/nbd0", "--image", "x"]).is_err());
        assert!(target(&[]).is_err());
    }
}
