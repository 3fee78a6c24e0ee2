#!/usr/bin/perl
# A client of NBD that remembers what it was promised: guest-promises.pl SOCKET EXPORT PROMISED EVERY
#
# First every block is read: it must hold its own number and one version throughout, no older than the file PROMISED
# says (lines `promised EXPORT BLOCK VERSION`).  Then blocks are written until the process ends, with a flush after EVERY
# writes (0: never); once a write was answered, or the flush after it, its line goes to standard output.
use strict;
use warnings;
use IO::Socket::UNIX;

my ($socket, $export, $promised, $every) = @ARGV;
my ($BLOCKS, $LEN) = (2048, 4096);
$| = 1;
my $nbd = IO::Socket::UNIX->new(Peer => $socket) or die "not ok guest: $socket: $!\n";
binmode $nbd;

sub take {
    my ($len) = @_;
    my $data = '';
    while (length $data < $len) {
        my $got = sysread $nbd, $data, $len - length $data, length $data;
        die "not ok guest: the server has gone\n" unless $got;
    }
    return $data;
}

sub give {
    my ($data) = @_;
    my $at = 0;
    while ($at < length $data) {
        my $sent = syswrite $nbd, $data, length($data) - $at, $at;
        die "not ok guest: the server has gone\n" unless $sent;
        $at += $sent;
    }
}

take(18);
give(pack('N', 3) . 'IHAVEOPT' . pack('NN', 1, length $export) . $export);
take(10);

sub request {
    my ($type, $block, $data) = @_;
    my @place = $type == 3 ? (0, 0) : ($block * $LEN, $LEN);
    give(pack('NnnQ>Q>N', 0x25609513, 0, $type, 7, @place) . $data);
    my ($magic, $error) = unpack 'NN', take(16);
    die "not ok guest: request $type of block $block: magic $magic, error $error\n" if $magic != 0x67446698 || $error;
    return $type == 0 ? take($LEN) : '';
}

my (%promised, $version);
$version = 0;
if (open my $file, '<', $promised) {
    while (<$file>) {
        next unless /^promised (\S+) (\d+) (\d+)$/ && $1 eq $export;
        $promised{$2} = $3 if $3 > ($promised{$2} // 0);
        $version = $3 if $3 > $version;
    }
}
for my $block (0 .. $BLOCKS - 1) {
    my $data = request(0, $block, '');
    my ($number, $found) = unpack 'Q<Q<', $data;
    my $whole = $found == 0 ? "\0" x $LEN : pack('Q<Q<', $block, $found) x ($LEN / 16);
    die "not ok guest: $export: block $block is torn or another one ($number, version $found)\n" if $data ne $whole;
    my $least = $promised{$block} // 0;
    die "not ok guest: $export: block $block has version $found, but $least was promised\n" if $found < $least;
    $version = $found if $found > $version;
}
print "ok guest: $export: verified ", scalar(keys %promised), " promised blocks\n";
my @answered;
while (1) {
    $version++;
    my $block = int rand $BLOCKS;
    request(1, $block, pack('Q<Q<', $block, $version) x ($LEN / 16));
    push @answered, "promised $export $block $version\n";
    next if @answered < $every;
    request(3, 0, '') if $every;
    print @answered;
    @answered = ();
}
